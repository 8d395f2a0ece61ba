"""The sections of `strategy` that have a `type`, and `train.quantize`, as unions of the classes in the registries."""

from __future__ import annotations

from typing import TYPE_CHECKING

from orchestray.trainers.aggregation.registry import AGGREGATIONS
from orchestray.trainers.compression.registry import COMPRESSIONS
from orchestray.trainers.few_bits.registry import QUANTIZATIONS
from orchestray.trainers.sync.registry import EXCHANGES

if TYPE_CHECKING:
    from orchestray.trainers.aggregation.params import Krum, Mean, Median, MultiKrum, TrimmedMean
    from orchestray.trainers.compression.params import (
        AdaptiveThreshold,
        BFloat16,
        Dgc,
        Float16,
        NoCompression,
        OneBit,
        PowerSgd,
        Qsgd,
        TernGrad,
        Threshold,
        TopK,
    )
    from orchestray.trainers.few_bits.params import Bnn, DoReFa, FlexPoint, Twn
    from orchestray.trainers.sync.allreduce.params import AllReduce
    from orchestray.trainers.sync.local.params import Averaging, ElasticAveraging, Gossip, Independent
    from orchestray.trainers.sync.parameter_server import ParameterServer

    Exchange = AllReduce | ParameterServer | Gossip | Averaging | ElasticAveraging | Independent
    Compression = (
        NoCompression
        | Float16
        | BFloat16
        | Qsgd
        | TernGrad
        | OneBit
        | TopK
        | Threshold
        | AdaptiveThreshold
        | Dgc
        | PowerSgd
    )
    Aggregation = Mean | Krum | MultiKrum | Median | TrimmedMean
    Quantize = Bnn | Twn | DoReFa | FlexPoint
else:
    Exchange, Compression, Aggregation = EXCHANGES.union(), COMPRESSIONS.union(), AGGREGATIONS.union()
    Quantize = QUANTIZATIONS.union()
