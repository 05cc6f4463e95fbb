"""Solvers, operators between functions, networks in continuous time."""

from __future__ import annotations

import torch
from torch import nn

from .. import Built
from .subjects import SUBJECTS, normal, subject


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
