//! Devices at work: one [`DeviceHost`](device::DeviceHost) for each device, for all models on it.
//!
//! | module | has |
//! |---|---|
//! | [`device`] | the host of a device: its lock, lanes, launches, input rings, and models on it |
//! | [`scheduler`] | gives `downbeat_driver` the clock, the waiting requests and the slots of devices, and rehearses |
//! | [`request`] | a request that waits: its tensors, queue, ticket and reply |
//! | [`run`] | runs that may fail or hang, and the watchdog that ends them |
//! | [`shares`] | drives the machine that gives models their shares of a device (GSLICE) |
//! | [`groups`] | the predictor of operator groups (Abacus), and its training in service |
//! | [`device_map`], [`model_memory`] | the devices of every model, and the CPU memory of models |
//! | [`decision_log`], [`pipeline_log`], [`request_log`] | the files of the decision log, the requests of pipelines in it, and those of clients |
//! | [`gpu_watch`] | the state of GPUs |
//!
//! A host tells listeners what happens. It names no model registry and no frontend. Only `device`
//! reaches a lane.

pub mod decision_log;
pub mod device;
pub mod device_map;
pub mod gpu_watch;
pub mod groups;
pub mod model_memory;
pub mod pipeline_log;
mod refiner;
pub mod request;
pub mod request_log;
pub mod run;
pub mod scheduler;
pub mod shares;
