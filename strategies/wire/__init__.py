"""What travels between server and clients: records, codecs, and the checks of every reply."""
