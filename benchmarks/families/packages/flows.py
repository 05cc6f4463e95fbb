"""Normalizing flows, Gaussian processes, densities that can be sampled."""

from __future__ import annotations

import torch
from torch import nn

from .. import Built
from .subjects import normal, subject


class LogProb(nn.Module):
    """How likely a distribution holds what it is given; of a module that makes one, under its other inputs."""

    def __init__(self, density: nn.Module):
        super().__init__()
        self.density = density

    def forward(self, x, *condition):
        density = self.density if hasattr(self.density, "log_prob") else self.density(*condition)
        return density.log_prob(x)


@subject("nflows/maf")
def _() -> Built:
    from nflows import distributions, flows, transforms

    t = transforms.CompositeTransform(
        [transforms.MaskedAffineAutoregressiveTransform(4, 32), transforms.RandomPermutation(4)]
    )
    flow = flows.Flow(t, distributions.StandardNormal([4]))

    return LogProb(flow), (normal(6, 4),), {}


@subject("nflows/rational quadratic spline")
def _() -> Built:
    from nflows import transforms
    from nflows.nn.nets import ResidualNet

    t = transforms.PiecewiseRationalQuadraticCouplingTransform(
        torch.tensor([1, 0, 1, 0]), lambda i, o: ResidualNet(i, o, 16), tails="linear", tail_bound=3.0
    )
    return t, (normal(6, 4),), {}


@subject("normflows/realnvp")
def _() -> Built:
    import normflows as nf

    fl = []
    for _i in range(4):
        fl += [
            nf.flows.AffineCouplingBlock(nf.nets.MLP([2, 32, 4], init_zeros=False)),
            nf.flows.Permute(4, mode="swap"),
        ]
    m = nf.NormalizingFlow(nf.distributions.base.DiagGaussian(4), fl)

    return LogProb(m), (normal(6, 4),), {}


@subject("zuko/NSF")
def _() -> Built:
    import zuko

    f = zuko.flows.NSF(4, 3, transforms=2, hidden_features=(32, 32))

    return LogProb(f), (normal(6, 4), normal(6, 3)), {}


@subject("zuko/MAF distribution")
def _() -> Built:
    import zuko

    f = zuko.flows.MAF(4, 0, transforms=2, hidden_features=(32, 32))

    return LogProb(f), (normal(6, 4),), {}


@subject("zuko/CNF")
def _() -> Built:
    import zuko

    f = zuko.flows.CNF(4, hidden_features=(32, 32))

    return LogProb(f), (normal(6, 4),), {}


@subject("FrEIA/glow")
def _() -> Built:
    import FrEIA.framework as Ff
    import FrEIA.modules as Fm

    m = Ff.SequenceINN(8)
    for _i in range(3):
        m.append(
            Fm.AllInOneBlock,
            subnet_constructor=lambda i, o: nn.Sequential(nn.Linear(i, 32), nn.ReLU(), nn.Linear(32, o)),
        )
    return m, (normal(6, 8),), {}


@subject("gpytorch/exact GP prior")
def _() -> Built:
    import gpytorch

    class GP(nn.Module):
        def __init__(self):
            super().__init__()
            self.k = gpytorch.kernels.ScaleKernel(gpytorch.kernels.RBFKernel())
            self.f = nn.Linear(4, 2)

        def forward(self, x):
            return self.k(self.f(x)).to_dense()

    return GP(), (normal(8, 4),), {}


@subject("gpytorch/SVGP")
def _() -> Built:
    import gpytorch

    class GP(gpytorch.models.ApproximateGP):
        def __init__(self):
            v = gpytorch.variational.VariationalStrategy(
                self,
                torch.linspace(-1, 1, 8)[:, None].repeat(1, 2),
                gpytorch.variational.CholeskyVariationalDistribution(8),
            )
            super().__init__(v)
            self.mean_module = gpytorch.means.ConstantMean()
            self.covar_module = gpytorch.kernels.ScaleKernel(gpytorch.kernels.RBFKernel())

        def forward(self, x):
            return gpytorch.distributions.MultivariateNormal(self.mean_module(x), self.covar_module(x))

    class M(nn.Module):
        def __init__(self):
            super().__init__()
            self.gp = GP()

        def forward(self, x):
            d = self.gp(x)
            return d.mean, d.variance

    return M(), (normal(6, 2),), {}


@subject("pyro-ppl/autoregressive network")
def _() -> Built:
    from pyro.nn import AutoRegressiveNN

    return AutoRegressiveNN(6, [32], param_dims=(1, 1)), (normal(5, 6),), {}


@subject("pyro-ppl/spline coupling")
def _() -> Built:
    from pyro.distributions.transforms import spline_coupling

    t = spline_coupling(4, hidden_dims=[16])

    class M(nn.Module):
        def __init__(self):
            super().__init__()
            self.t = t

        def forward(self, x):
            return t.log_abs_det_jacobian(x, self.t(x))

    return M(), (normal(5, 4),), {}
