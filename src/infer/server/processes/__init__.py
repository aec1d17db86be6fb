"""Several processes that serve one port.

board.py     shared memory: is the server starting or draining, how busy is each process
accept.py    accepts connections from the shared listening socket, balanced by their number
messages.py  the messages between process 0 and the others
channel.py   sends the messages over a socket pair
worker.py    one of the others: routes, tokenizer, a socket to every engine
workers.py   process 0's side: starts the others, announces engines and models, sums up metrics
"""
