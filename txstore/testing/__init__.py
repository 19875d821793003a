"""What a backend's author needs to prove a backend: the conformance suite and the fault-injecting store."""
