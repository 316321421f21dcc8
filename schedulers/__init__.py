"""Host-side scheduling in pure Python; never imports jax."""

from schedulers.buckets import Axes, Bucket, BucketLadder, BucketOverflow
from schedulers.budget import POLICIES, choose_prefill_budget
from schedulers.page_pool import PagePool, pages_for
from schedulers.plan import Chunk, DecodeRow, Plan
from schedulers.request import Released, Request, RequestRejected, UnknownRequest
from schedulers.scheduler import LaunchOutcome, Scheduler, SchedulerConfig, Stats
from schedulers.simulator import LinearCost, SimRequest, SimResult, StepCost, simulate
from schedulers.slot_pool import SlotPool
from schedulers.trace import (
    MixedLoad,
    PaddingWaste,
    StepRecord,
    StepTrace,
    check_mixed_load,
    itl_percentiles,
    padding_waste,
    stalled_decode_share,
)

__all__ = [
    "POLICIES",
    "Axes",
    "Bucket",
    "BucketLadder",
    "BucketOverflow",
    "Chunk",
    "DecodeRow",
    "LaunchOutcome",
    "LinearCost",
    "MixedLoad",
    "PaddingWaste",
    "PagePool",
    "Plan",
    "Released",
    "Request",
    "RequestRejected",
    "Scheduler",
    "SchedulerConfig",
    "SimRequest",
    "SimResult",
    "SlotPool",
    "Stats",
    "StepCost",
    "StepRecord",
    "StepTrace",
    "UnknownRequest",
    "check_mixed_load",
    "choose_prefill_budget",
    "itl_percentiles",
    "padding_waste",
    "pages_for",
    "simulate",
    "stalled_decode_share",
]
