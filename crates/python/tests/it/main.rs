//! Tests of Python models against a real Python.
