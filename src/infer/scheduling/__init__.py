"""The scheduler: decides which tokens of which sequences run in the next step. No tensors, no clock.

request.py, sequence.py    the request of a client; the token sequences that serve it
plan.py, scheduler.py      the work of a step, and the rules that decide it
policies.py                the order of sequences: arrival, priority, deadline
batch_state.py             sequences that run: their counts, as columns, and their block tables
waiting_queue.py           sequences that do not run
watch.py                   events for an observer, and why the queue waits
preemption.py              the choice between swapping and recomputation
beam.py                    beam search
"""
