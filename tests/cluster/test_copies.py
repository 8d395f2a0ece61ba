"""The object store copies an array once, when it is put."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import ray

from orchestray.trainers.survey.cluster.copies import Copies, object_store_copies

if TYPE_CHECKING:
    from orchestray.platform.cluster.cluster import Cluster


def test_copies_in_the_object_store_path_are_one_when_it_is_put_and_none_when_it_is_read(cluster: Cluster) -> None:
    assert cluster.address
    array = np.zeros(1_000_000)
    assert object_store_copies(ray, array) == Copies(put=1, get=0)
    assert not array.any()
