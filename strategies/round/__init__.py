"""A round: select clients, send messages, add up the replies, take the server's step."""
