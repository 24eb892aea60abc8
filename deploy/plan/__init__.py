"""How many hosts a load needs: service times from measurements or the roofline, queues from a simulation."""
