"""Host-side scheduling in pure Python; never imports jax."""

from schedulers.buckets import Axes, Bucket, BucketLadder, BucketOverflow
from schedulers.budget import POLICIES, choose_prefill_budget
from schedulers.page_pool import PagePool, pages_for
from schedulers.plan import Chunk, DecodeRow, Plan
from schedulers.request import Released, Request, RequestRejected, UnknownRequest
from schedulers.scheduler import LaunchOutcome, Scheduler, SchedulerConfig, Stats
from schedulers.slot_pool import SlotPool

__all__ = [
    "POLICIES",
    "Axes",
    "Bucket",
    "BucketLadder",
    "BucketOverflow",
    "Chunk",
    "DecodeRow",
    "LaunchOutcome",
    "PagePool",
    "Plan",
    "Released",
    "Request",
    "RequestRejected",
    "Scheduler",
    "SchedulerConfig",
    "SlotPool",
    "Stats",
    "UnknownRequest",
    "choose_prefill_budget",
    "pages_for",
]
