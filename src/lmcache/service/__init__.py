"""The calls of engines: registrations, sessions with their tokens, leases, reservations, frames over the socket.

Everything runs on the message loop's thread and holds no lock. The storage loop posts its results to it.
"""
