//! The interface between a device host and the threads of its lanes.
//!
//! A thread that ends a launch hands its [`OwnLaunch`] down with the outcome. A frontend's thread
//! hands one down with a request. The decisions about them put launches on lanes, and offer each
//! launch to the thread ([`OwnLaunch::offer`]). The thread takes the first launch that suits its
//! wish, and runs this launch itself. So the batch does not change threads.

use std::sync::Arc;

use downbeat_core::{RequestId, Time};
use downbeat_service::clock::Clock;

use super::crew::{Crew, Seat};
use super::launch::{Head, Outcome, Work};
use crate::run::watchdog::Watchdog;

/// The host of a device, as its lanes know it.
pub trait LaneHost: Send + Sync {
    /// The device's number.
    fn device(&self) -> usize;

    fn clock(&self) -> Clock;

    fn watchdog(&self) -> &Arc<Watchdog>;

    /// A lane begins a launch.
    fn begin(&self, head: &Head) -> Time;

    /// A lane has ended a launch, which it had from `begin` to `end`.
    fn finish(&self, head: Head, begin: Time, end: Time, outcome: Outcome, own: &mut OwnLaunch);

    /// Whether the client of any of these requests still waits.
    fn is_awaited(&self, requests: &mut dyn Iterator<Item = &RequestId>) -> bool;
}

/// Which launch a thread takes.
#[derive(Default)]
pub enum Wanted {
    #[default]
    None,
    /// A brief launch.
    Brief,
    /// A brief launch that goes on with a batch.
    BriefRest,
    /// A launch of this crew's lanes that goes on with a batch, or is brief. While this thread
    /// answers the ended launch, another thread begins any other one.
    Of(Arc<Crew>),
}

/// A thread's wish to run a launch that follows from its act. The default: no wish.
#[derive(Default)]
pub struct OwnLaunch {
    wanted: Wanted,
    taken: Option<Taken>,
}

/// A lane that has the launch, held for the thread.
pub struct Taken {
    pub host: Arc<dyn LaneHost>,
    pub seat: Arc<Seat>,
}

impl OwnLaunch {
    /// The first launch that is wanted.
    pub fn wants(wanted: Wanted) -> Self {
        OwnLaunch { wanted, taken: None }
    }

    /// Offers a lane of `host` that has a launch: the thread holds the lane if it wants the launch,
    /// or the crew is called.
    pub fn offer(&mut self, seat: &Arc<Seat>, host: impl FnOnce() -> Option<Arc<dyn LaneHost>>) {
        let takes = match &self.wanted {
            Wanted::None => false,
            Wanted::Brief => seat.claim(Work::is_brief),
            Wanted::BriefRest => seat.claim(|work| work.is_brief() && work.goes_on()),
            Wanted::Of(crew) => Arc::ptr_eq(crew, &seat.crew) && seat.claim(|work| work.goes_on() || work.is_brief()),
        };
        if !takes {
            return seat.call();
        }
        self.wanted = Wanted::None;
        self.taken = host().map(|host| Taken { host, seat: seat.clone() });
        if self.taken.is_none() {
            seat.release();
        }
    }

    /// The lane with the launch, which the caller runs now.
    pub fn take(mut self) -> Option<Taken> {
        self.taken.take()
    }
}

impl Drop for OwnLaunch {
    /// A lane that the thread holds and will not run, as it panics, is held no more.
    fn drop(&mut self) {
        self.taken.iter().for_each(|taken| taken.seat.release());
    }
}
