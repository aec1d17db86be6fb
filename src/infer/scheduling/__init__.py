"""The scheduler: which tokens of which sequences run in the next step. Integers only, no tensor, no clock.

request.py, sequence.py    what a client asked for; one line of tokens being made
plan.py, scheduler.py      what a step computes, and the rule that decides it
policies.py                orders of arrival, priority, deadline
waiting_queue.py           sequences that do not run
preemption.py              what taking back blocks costs
beam.py                    beam search
"""
