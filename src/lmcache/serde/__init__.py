"""What becomes of KV on its way to a tier: compression, encryption, and types of your own."""
