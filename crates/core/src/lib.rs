//! Downbeat's decisions, and the vocabulary they are made in.
//!
//! This crate never reads a clock, never spawns, locks or waits, never opens a file or a
//! socket. Time comes in with each event, decisions go out. Rehearsals draw pseudo-random numbers
//! from a seed that the caller gives.
//! The same code runs in the server and in the simulator.
//!
//! # A scheduler, driven by hand
//!
//! A batch of `b` items takes `5 + 5 b` ms. Requests arrive at 0, 2 and 3 ms, and each must be
//! answered within 30 ms. `docs/concepts.md` draws this example.
//!
//! ```
//! use downbeat_core::cluster::{DispatchPolicy, DropPolicy, ModelOptions, Output, Request, Scheduler};
//! use downbeat_core::{DeviceKind, LatencyProfile, RequestId, Time};
//!
//! let ms = |ms: u64| Time::from_nanos(ms * 1_000_000);
//! let mut scheduler = Scheduler::new();
//! scheduler.add_device(ms(0), DeviceKind(0));
//! let profile = LatencyProfile::linear_ms(5.0, 5.0, 8)?;
//! let options = ModelOptions::new(profile, DispatchPolicy::Deferred, DropPolicy::WindowDrop);
//! let model = scheduler.add_model(ms(0), options);
//! for (id, arrival) in [(0, 0), (1, 2), (2, 3)] {
//!     let deadline = ms(arrival + 30);
//!     let request = Request { id: RequestId(id), model, deadline, queue_expiry: Time::MAX, level: 0, size: 1 };
//!     scheduler.handle_request(ms(arrival), request)?;
//! }
//!
//! // Until 5 ms a fourth request could join in time, so the batch waits.
//! assert_eq!(scheduler.poll_output(), None);
//! let (wake, _) = scheduler.poll_timeout().expect("requests wait");
//! assert_eq!(wake, ms(5));
//!
//! scheduler.handle_timeout(wake);
//! let Some(Output::Dispatch { batch, device, members, start, expected, .. }) = scheduler.poll_output() else {
//!     panic!("the batch leaves at 5 ms")
//! };
//! assert_eq!(members, [RequestId(0), RequestId(1), RequestId(2)]);
//! assert_eq!(start + expected, ms(25));
//! scheduler.handle_completion(ms(25), device, batch);
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

pub mod cluster;
pub mod device;
pub mod device_profiles;
pub mod file_content;
pub mod ids;
pub mod isotonic;
pub mod journal;
mod names;
pub mod pages;
pub mod pipeline;
pub mod probes;
pub mod profile;
pub mod quantile;
pub mod rollout;
pub mod shape_guess;
pub mod tenants;
pub mod tensor;
pub mod time;

pub use device_profiles::DeviceProfiles;
pub use ids::{BatchId, DeviceId, DeviceKind, ModelId, RequestId};
pub use names::UnknownName;
pub use profile::{LatencyProfile, ProfileError, ProfilePoint};
pub use quantile::{median, quantiles};
pub use time::{Duration, Time};
