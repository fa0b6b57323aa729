//! Why a batch left when it did, and why a request did not: the numbers behind a decision.

use serde::{Deserialize, Serialize};

use crate::time::{Duration, Time};

/// What decided when a batch starts.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Serialize, Deserialize)]
pub enum StartBound {
    /// It cannot grow: it starts as soon as it can.
    Full,
    /// One more request could no longer join in time: `d - l(b+1)` ([`super::DispatchPolicy::Deferred`]).
    Frontrun,
    /// The last moment: `d - l(b)` ([`super::DispatchPolicy::Latest`], or no policy waits longer).
    Latest,
    /// The first request has waited for the configured delay ([`super::DispatchPolicy::Timeout`]).
    Timeout,
    /// The wake margin before a member would have been lost.
    WakeMargin,
    /// It may start at once ([`super::DispatchPolicy::Eager`], or there is no deadline to count back from).
    Eager,
    /// Its window was open, and it waited for a device.
    Device,
}

/// Why a batch leaves now: the numbers that decided it.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct DispatchReason {
    /// What it waited for last.
    pub bound: StartBound,
    /// When its window opened; before the start if it waited for a device or if the last arrival moved it.
    pub exec: Time,
    /// When its window closes: `d - l(b)`; `Time::MAX` if nothing is lost by waiting.
    pub latest: Time,
    /// `d`, the earliest deadline in it, without the reply's delay.
    pub deadline: Time,
    /// Items that stay in the queue.
    pub left: u32,
}

/// What a dropped request was judged by.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct DropDetail {
    /// Its items.
    pub size: u32,
    /// When its batch had to be done, without the reply's delay.
    pub deadline: Time,
    /// The least time that it needed, alone and on an idle device: `l(size)` and the way there.
    pub needed: Duration,
    /// The batch size that the window drop aimed at; 0 where the policy has no target.
    pub target: u32,
}
