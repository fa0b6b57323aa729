//! A device host: the lanes, launches, memory and shares of a device.

pub mod decision_log;
pub mod device;
pub mod device_map;
pub mod gpu_watch;
pub mod groups;
pub mod model_memory;
mod refiner;
pub mod request;
pub mod run;
pub mod scheduler;
pub mod shares;
