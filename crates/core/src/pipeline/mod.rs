//! Pipelines: several models that answer a request together, under one deadline.

pub mod graph;
