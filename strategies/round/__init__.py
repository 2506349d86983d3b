"""The round over Flower: messages, registration, the server's step and what it reports."""
