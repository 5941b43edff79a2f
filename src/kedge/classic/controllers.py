"""The KL controllers under their classic names and signatures."""

from __future__ import annotations

from kedge.engine.kl_control import AdaptiveKL, FixedKL


class AdaptiveKLController(AdaptiveKL):
    """Steers the KL towards ``target``; see ``kedge.engine.kl_control.AdaptiveKL``.

    Args:
        init_kl_coef: the coefficient to start from.
        target: wanted KL, nats per response.
        horizon: responses over which an error of 100% would double the coefficient.
    """

    def __init__(self, init_kl_coef: float, target: float, horizon: float) -> None:
        super().__init__(value=init_kl_coef, target=target, horizon=horizon)


class FixedKLController(FixedKL):
    """A coefficient that never changes.

    Args:
        kl_coef: the coefficient.
    """

    def __init__(self, kl_coef: float) -> None:
        super().__init__(value=kl_coef)
