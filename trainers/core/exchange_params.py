"""The base class of the parameters of exchanges, with the facts that training needs before an exchange is built."""

from __future__ import annotations

from typing import ClassVar

from orchestray.platform.config.base import Section


class ExchangeParams(Section):
    """The parameters of an exchange, with facts about its scheme."""

    diverges: ClassVar[bool] = False
    """True if each replica updates its own parameters, and the replicas synchronize them from time to time or never."""
    compresses: ClassVar[bool] = False
    """True if the exchange sends what `strategy.compression` makes of its tensors."""
    is_seeded: ClassVar[bool] = False
    """True if the exchange draws random numbers: its class receives the run's `seed`."""
