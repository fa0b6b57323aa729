//! Integration tests of the model repository.

mod examples;
