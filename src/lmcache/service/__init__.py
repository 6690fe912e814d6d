"""What the server does with a call: who is registered, what a request's tokens are, which slots are leased or reserved.

Everything here runs on the message loop's thread and holds no lock. Results of the storage loop are posted to it.
"""
