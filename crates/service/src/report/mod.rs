//! Reports on the server and its cluster: plain data that frontends show.

pub mod autoscale;
pub mod client_ids;
pub mod cluster_report;
pub mod device_report;
pub mod live;
pub mod machine_load;
pub mod missed;
pub mod policy_report;
pub mod rollout;
pub mod scheduler_status;
pub mod timeline;
pub mod what_if;
