"""A round: who is asked, what comes back, how it is added up, and the step of the server."""
