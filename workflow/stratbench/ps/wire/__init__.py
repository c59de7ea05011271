"""What passes between workers and servers: frames, handshake, shared memory and sockets."""
