"""The certificate: what the log and the journals say, checked line by line, and what follows from it. No torch."""
