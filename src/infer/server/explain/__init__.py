"""Why a request took as long as it did: the knowledge of the server and its engines, put into words."""
