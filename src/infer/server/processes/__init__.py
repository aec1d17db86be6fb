"""Several processes that answer on one port.

board.py     numbers that all of them share: is the server starting or draining, how busy is each
accept.py    connections from the shared listening socket, to the process with the fewest
messages.py  the types of what process 0 and the others tell and ask
channel.py   their way over a socket pair
worker.py    one of the others: routes, tokenizer, a socket to every engine
workers.py   process 0's side: starts them, tells them of engines and models, adds up their counts
"""
