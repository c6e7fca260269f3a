"""The LMCache multiprocess protocol: messages, one dialect per server release, ZMQ."""
