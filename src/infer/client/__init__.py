"""An engine behind a queue: in a thread of this process, or in a process of its own.

client.py          `EngineClient`, and the engine in a thread
imports.py         PyTorch in half the time
load.py            the weights of an engine
subscribers.py     request ids to readers, and how much may wait for one
link.py            one end of the socket between them
messages.py        what crosses between processes
process.py         the engine's process
process_client.py  the side that asks it
spawn.py           starts it, before it is needed
supervisor.py      watches and restarts it
"""
