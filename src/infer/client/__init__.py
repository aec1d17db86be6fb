"""An engine behind a queue: in a thread of this process, or in a process of its own.

client.py          `EngineClient`, and the engine in a thread
imports.py         faster imports of PyTorch
load.py            loads the weights of an engine
subscribers.py     routes outputs from request ids to readers, and bounds unread output
link.py            the server's end of the socket
messages.py        the messages between processes
process.py         the engine's process
engine_server.py   its loop
sleeping.py        an engine whose weights wait in host memory
process_client.py  the client of that process
spawn.py           starts the process before it is needed
supervisor.py      watches the process, and limits restarts
"""
