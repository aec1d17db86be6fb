"""Why a request took as long as it did: what the server and its engines know of it, put into words."""
