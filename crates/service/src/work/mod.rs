//! Threads for work that a connection must not wait for.

pub mod offload;
pub mod turn_end;
pub mod work_line;
pub mod work_pool;
