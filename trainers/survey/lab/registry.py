"""The experiments by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from orchestray.trainers.survey.lab import (
    caching,
    compiling,
    connecting,
    convolving,
    deadline,
    defining,
    dividing,
    gridding,
    map_reduce,
    messaging,
    minibatches,
    moving,
    multiplying,
    partitioning,
    predicting,
    remembering,
    replicating,
    settings,
    shrinking,
)
from orchestray.trainers.survey.lab.exhibit import Exhibit


@dataclass(frozen=True)
class Experiment:
    """An experiment.

    Args:
        run: returns its table; gets the number of rounds.
        line: a line on it.
        rounds: rounds of the timings if none are asked for; 0: nothing is timed.
    """

    run: Callable[[int], Exhibit]
    line: str
    rounds: int = 7


EXPERIMENTS: Mapping[str, Experiment] = {
    "convolutions": Experiment(convolving.convolving, "each algorithm of a convolution, by kernel and size"),
    "convolution-costs": Experiment(
        convolving.counted, "operations, depth and bytes of each algorithm of a convolution", 0
    ),
    "winograd": Experiment(
        convolving.winograd_error, "the error of Winograd's convolution by the size of its tiles", 0
    ),
    "layouts": Experiment(convolving.layouts, "images with samples outermost (NCHW) and innermost (CHWN)"),
    "gemm": Experiment(multiplying.gemm, "products of matrices by size: GFLOP/s, and how far from linear times are"),
    "fully-connected": Experiment(multiplying.fully_connected, "samples one by one, batched, and in fixed point"),
    "onednn": Experiment(settings.onednn, "torch's operations with oneDNN on and off"),
    "compiled": Experiment(compiling.compiled, "torch's operators one by one, and graphs that torch.compile makes", 20),
    "threads": Experiment(settings.thread_sweep, "torch's operations on one thread and more"),
    "deadline": Experiment(deadline.deadline, "the most accurate network that answers in time", 200),
    "small-networks": Experiment(
        shrinking.small_networks, "networks that are small by design: size, time, accuracy", 50
    ),
    "minibatches": Experiment(
        minibatches.minibatches, "minibatch sizes: samples a second, accuracy, steps to a target", 20
    ),
    "predictions": Experiment(
        predicting.predictions, "times of training by models of the literature, beside those that networks take", 100
    ),
    "persistent": Experiment(moving.persistent, "recurrent weights that stay on workers, and that are fetched", 5),
    "partitions": Experiment(partitioning.partitions, "a fully connected layer cut in four ways over workers", 0),
    "grids": Experiment(gridding.grid_sweep, "a layer on every grid between data and model parallelism", 0),
    "backends": Experiment(connecting.backends, "what carries tensors between processes, and which types it takes", 0),
    "interpreter-lock": Experiment(replicating.interpreter_lock, "replicas as threads of a process, and as processes"),
    "map-reduce": Experiment(map_reduce.map_reduce, "training by map and reduce tasks of Ray, with one killed", 0),
    "message-driven": Experiment(
        messaging.message_driven, "training by messages between the nodes of a network, some samples at once", 0
    ),
    "unlike-devices": Experiment(dividing.unlike_devices, "batches divided over two devices of unlike speed"),
    "parameter-cache": Experiment(caching.parameter_cache, "a server's weights in a memory too small for them", 0),
    "feed-forward": Experiment(
        defining.feed_forward_operators, "convolution, pooling and activations by their definitions", 3
    ),
    "reductions": Experiment(defining.reductions, "sums in a chain and in a tree: the same work, another depth", 0),
    "losses": Experiment(defining.losses, "softmax cross-entropy and squared loss by their formulas", 3),
    "cells": Experiment(defining.recurrent_cells, "Elman's cell, LSTM and GRU by their equations", 0),
    "bptt": Experiment(remembering.truncated, "backpropagation through time, whole and cut after some steps", 0),
    "recurrent-memory": Experiment(
        remembering.stored_states, "backpropagation through 1,000 steps with few stored states", 0
    ),
    "traffic": Experiment(moving.traffic, "words moved by tiled convolutions, against their lower bound", 0),
}
