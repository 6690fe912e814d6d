"""What several folders of tests share: models, devices, adapters that fail, an engine that is simulated."""
