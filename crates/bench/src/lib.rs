//! Open-loop load on any Open Inference Protocol server. Never links the server.
