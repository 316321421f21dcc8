"""Measuring: workloads, loops, device traces, floors and the records of results files. Nothing else imports it."""
