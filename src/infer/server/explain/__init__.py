"""Explanations of why a request took as long as it did, from the records of the server and its engines."""
