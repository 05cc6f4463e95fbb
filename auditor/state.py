from contextlib import contextmanager

from .load.sandbox import preserved_rng
from .load.state import _restore


@contextmanager
def unchanged(model, *holders):
    buffers = {m: dict(m._buffers) for m in model.modules()}
    values = {id(b): b.detach().clone() for own in buffers.values() for b in own.values() if b is not None}
    with preserved_rng():
        try:
            yield
        finally:
            for module, own in buffers.items():
                _restore(module, own, values)
