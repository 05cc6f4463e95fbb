"""Lets timm and transformers import a torchvision that has no compiled operators for the torch at hand.

Every Python process of the tests runs this: conftest.py puts this directory on PYTHONPATH. It imports nothing.
"""

import sys
from types import ModuleType

for name in ("torchvision._meta_registrations", "torchvision._autograd_registrations"):
    sys.modules.setdefault(name, ModuleType(name))
