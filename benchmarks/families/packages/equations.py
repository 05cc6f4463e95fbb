"""Solvers, flows, processes, operators between functions, networks in continuous time."""

from __future__ import annotations

import torch
from torch import nn

from .. import Built
from .subjects import SUBJECTS, integers, normal, subject


@subject("torchdiffeq/rk4")
def _() -> Built:
    from torchdiffeq import odeint

    class Ode(nn.Module):
        def __init__(self, method):
            super().__init__()
            self.method = method
            self.net = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 8))

        def forward(self, x):
            return odeint(lambda t, y: self.net(y), x, torch.linspace(0, 1, 5), method=self.method)

    return Ode("rk4"), (normal(4, 8),), {}


@subject("torchdiffeq/dopri5")
def _() -> Built:
    m, a, k = SUBJECTS["torchdiffeq/rk4"]()
    m.method = "dopri5"
    return m, a, k


@subject("torchdiffeq/adjoint")
def _() -> Built:
    from torchdiffeq import odeint_adjoint

    class F_(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 8))

        def forward(self, t, y):
            return self.net(y)

    class Ode(nn.Module):
        def __init__(self):
            super().__init__()
            self.f = F_()
            self.o = nn.Linear(8, 2)

        def forward(self, x):
            return self.o(odeint_adjoint(self.f, x, torch.tensor([0.0, 1.0]), method="midpoint")[-1])

    return Ode(), (normal(4, 8),), {}


@subject("torchsde/euler")
def _() -> Built:
    import torchsde

    class Sde(nn.Module):
        noise_type = "diagonal"
        sde_type = "ito"

        def __init__(self):
            super().__init__()
            self.mu = nn.Linear(8, 8)
            self.sigma = nn.Linear(8, 8)

        def f(self, t, y):
            return self.mu(y)

        def g(self, t, y):
            return 0.1 * self.sigma(y).sigmoid()

        def forward(self, y):
            return torchsde.sdeint(
                self,
                y,
                torch.linspace(0, 1, 3),
                dt=0.25,
                bm=torchsde.BrownianInterval(0.0, 1.0, size=(4, 8), entropy=7, levy_area_approximation="space-time"),
            )

    return Sde(), (normal(4, 8),), {}


@subject("torchcde/neural CDE")
def _() -> Built:
    import torchcde

    class Cde(nn.Module):
        def __init__(self):
            super().__init__()
            self.i = nn.Linear(3, 8)
            self.net = nn.Linear(8, 24)
            self.o = nn.Linear(8, 1)

        def forward(self, coeffs):
            X = torchcde.CubicSpline(coeffs)
            z0 = self.i(X.evaluate(X.interval[0]))

            def f(t, z):
                return self.net(z).tanh().view(-1, 8, 3)

            return self.o(
                torchcde.cdeint(
                    X=X, func=f, z0=z0, t=X.interval, method="rk4", options={"step_size": 1.0}, adjoint=False
                )[:, -1]
            )

    return Cde(), (torchcde.hermite_cubic_coefficients_with_backward_differences(normal(4, 6, 3)),), {}


@subject("torchode/tsit5")
def _() -> Built:
    import torchode as to

    class M(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 4))

        def forward(self, y):
            term = to.ODETerm(lambda t, y: self.net(y))
            step = to.Tsit5(term=term)
            s = to.AutoDiffAdjoint(step, to.IntegralController(1e-3, 1e-3, term=term))
            return s.solve(to.InitialValueProblem(y0=y, t_start=torch.zeros(3), t_end=torch.ones(3))).ys

    return M(), (normal(3, 4),), {}


@subject("nflows/maf")
def _() -> Built:
    from nflows import distributions, flows, transforms

    t = transforms.CompositeTransform(
        [transforms.MaskedAffineAutoregressiveTransform(4, 32), transforms.RandomPermutation(4)]
    )
    flow = flows.Flow(t, distributions.StandardNormal([4]))

    class M(nn.Module):
        def __init__(self):
            super().__init__()
            self.flow = flow

        def forward(self, x):
            return self.flow.log_prob(x)

    return M(), (normal(6, 4),), {}


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

    class M(nn.Module):
        def __init__(self):
            super().__init__()
            self.m = m

        def forward(self, x):
            return self.m.log_prob(x)

    return M(), (normal(6, 4),), {}


@subject("zuko/NSF")
def _() -> Built:
    import zuko

    f = zuko.flows.NSF(4, 3, transforms=2, hidden_features=(32, 32))

    class M(nn.Module):
        def __init__(self):
            super().__init__()
            self.f = f

        def forward(self, x, c):
            return self.f(c).log_prob(x)

    return M(), (normal(6, 4), normal(6, 3)), {}


@subject("zuko/MAF distribution")
def _() -> Built:
    import zuko

    f = zuko.flows.MAF(4, 0, transforms=2, hidden_features=(32, 32))

    class M(nn.Module):
        def __init__(self):
            super().__init__()
            self.f = f

        def forward(self, x):
            return self.f().log_prob(x)

    return M(), (normal(6, 4),), {}


@subject("zuko/CNF")
def _() -> Built:
    import zuko

    f = zuko.flows.CNF(4, hidden_features=(32, 32))

    class M(nn.Module):
        def __init__(self):
            super().__init__()
            self.f = f

        def forward(self, x):
            return self.f().log_prob(x)

    return M(), (normal(6, 4),), {}


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


@subject("neuraloperator/FNO")
def _() -> Built:
    from neuralop.models import FNO

    return (
        FNO(n_modes=(4, 4), hidden_channels=8, in_channels=1, out_channels=1, n_layers=2),
        (normal(1, 1, 16, 16),),
        {},
    )


@subject("neuraloperator/UNO")
def _() -> Built:
    from neuralop.models import UNO

    return (
        UNO(
            in_channels=1,
            out_channels=1,
            hidden_channels=8,
            n_layers=3,
            channel_mlp_skip="linear",
            uno_out_channels=[8, 8, 8],
            uno_n_modes=[[4, 4]] * 3,
            uno_scalings=[[1, 1]] * 3,
        ),
        (normal(1, 1, 16, 16),),
        {},
    )


@subject("pykan/KAN")
def _() -> Built:
    from kan import MultKAN

    m = MultKAN(width=[2, 3, 1], grid=3, k=3, seed=0, auto_save=False, symbolic_enabled=False, save_act=False)
    return m, (normal(8, 2),), {}


@subject("ncps/CfC")
def _() -> Built:
    from ncps.torch import CfC

    return CfC(4, 16), (normal(2, 10, 4),), {}


@subject("ncps/LTC")
def _() -> Built:
    from ncps.torch import LTC

    return LTC(4, 8), (normal(2, 4, 4),), {}


@subject("pytorch-crf/tagger")
def _() -> Built:
    from torchcrf import CRF

    class M(nn.Module):
        def __init__(self):
            super().__init__()
            self.l = nn.LSTM(8, 8, batch_first=True)
            self.o = nn.Linear(8, 5)
            self.crf = CRF(5, batch_first=True)

        def forward(self, x, tags):
            return self.crf(self.o(self.l(x)[0]), tags)

    return M(), (normal(2, 7, 8), integers(5, 2, 7)), {}


@subject("mambapy/Mamba")
def _() -> Built:
    from mambapy.mamba import Mamba, MambaConfig

    return Mamba(MambaConfig(d_model=16, n_layers=2)), (normal(1, 16, 16),), {}


@subject("mambapy/Mamba sequential")
def _() -> Built:
    from mambapy.mamba import Mamba, MambaConfig

    return Mamba(MambaConfig(d_model=16, n_layers=1, pscan=False)), (normal(1, 16, 16),), {}


@subject("s5-pytorch/S5")
def _() -> Built:
    from s5 import S5

    return S5(16, 16), (normal(1, 20, 16),), {}


@subject("lambda-networks/LambdaLayer")
def _() -> Built:
    from lambda_networks import LambdaLayer

    return LambdaLayer(dim=16, dim_out=16, r=5, dim_k=8, heads=2, dim_u=1), (normal(1, 16, 8, 8),), {}


@subject("bottleneck-transformer-pytorch/BottleStack")
def _() -> Built:
    from bottleneck_transformer_pytorch import BottleStack

    return (
        BottleStack(
            dim=16, fmap_size=8, dim_out=32, num_layers=1, heads=2, dim_head=8, rel_pos_emb=True, downsample=False
        ),
        (normal(1, 16, 8, 8),),
        {},
    )


@subject("memory-efficient-attention-pytorch/Attention")
def _() -> Built:
    from memory_efficient_attention_pytorch import Attention

    return (
        Attention(dim=16, dim_head=8, heads=2, memory_efficient=True, q_bucket_size=8, k_bucket_size=8),
        (normal(1, 32, 16),),
        {},
    )


@subject("recurrent-memory-transformer-pytorch/RMT")
def _() -> Built:
    from recurrent_memory_transformer_pytorch import RecurrentMemoryTransformer

    return (
        RecurrentMemoryTransformer(
            num_tokens=64, num_memory_tokens=4, dim=32, depth=1, heads=2, dim_head=16, seq_len=16, causal=True
        ),
        (integers(64, 1, 16),),
        {},
    )
