"""Small configurations and hand-driven schedulers for the tests."""

from schedulers import Plan, Request, Scheduler, SchedulerConfig


def config(**changes) -> SchedulerConfig:
    """Eight sequences, 256 prefill tokens a step, 1,024 tokens a request; device overlap gets a staging pool."""
    values = {
        "max_num_seqs": 8,
        "max_num_batched_tokens": 256,
        "max_model_len": 1024,
        "num_pages": 65,
        "num_slots": 9,
    }
    if changes.get("overlap") == "device":
        values |= {"staging_slots": 4, "staging_pages": 17}
    return SchedulerConfig(**(values | changes))


def scheduler(**changes) -> Scheduler:
    return Scheduler(config(**changes))


def submit(sched: Scheduler, *requests: tuple[str, int, int]) -> None:
    for request_id, prompt_len, max_tokens in requests:
        sched.submit(Request(request_id, prompt_len, max_tokens))


def spans(plan: Plan) -> list[tuple[str, int, int]]:
    """(id, start, length) of the plan's chunks."""
    return [(chunk.request_id, chunk.start, chunk.length) for chunk in plan.chunks]


def row_ids(plan: Plan) -> list[str]:
    return [row.request_id for row in plan.rows]


def start_decoding(sched: Scheduler, request_id: str, prompt_len: int, max_tokens: int) -> None:
    """Submit a request to an otherwise idle prefill queue and run its prompt, so that it decodes from the next tick."""
    submit(sched, (request_id, prompt_len, max_tokens))
    while True:
        plan = sched.tick()
        if plan.handle is not None:
            sched.chunk_done(plan.handle)
        if any(chunk.request_id == request_id and chunk.last for chunk in plan.chunks):
            return
