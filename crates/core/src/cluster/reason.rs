//! The numbers behind a decision: why a batch left when it did, and why a request was dropped.

use serde::{Deserialize, Serialize};

use crate::time::{Duration, Time};

/// The rule that decided when a batch starts.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Serialize, Deserialize)]
pub enum StartBound {
    /// The batch cannot grow: it starts as soon as possible.
    Full,
    /// One more request could no longer join in time: `d - l(b+1)`
    /// ([`super::DispatchPolicy::Deferred`]).
    Frontrun,
    /// The last moment: `d - l(b)`. Under [`super::DispatchPolicy::Latest`], or because no policy
    /// waits longer.
    Latest,
    /// The first request has waited for the configured delay ([`super::DispatchPolicy::Timeout`]).
    Timeout,
    /// The last moment less the wake margin.
    WakeMargin,
    /// The batch may start at once: under [`super::DispatchPolicy::Eager`], or because no deadline
    /// gives a time to count back from.
    Eager,
    /// The batch's window was open, and it waited for a device.
    Device,
    /// Batches of this size keep up with the arrivals ([`super::DispatchPolicy::EarlyLeave`]).
    KeepsUp,
}

impl StartBound {
    /// All rules.
    pub const ALL: [StartBound; 8] = [
        StartBound::Full,
        StartBound::Frontrun,
        StartBound::Latest,
        StartBound::Timeout,
        StartBound::WakeMargin,
        StartBound::Eager,
        StartBound::Device,
        StartBound::KeepsUp,
    ];

    /// The rule's name in reports.
    pub const fn name(self) -> &'static str {
        match self {
            StartBound::Full => "full",
            StartBound::Frontrun => "frontrun",
            StartBound::Latest => "latest",
            StartBound::Timeout => "timeout",
            StartBound::WakeMargin => "wake_margin",
            StartBound::Eager => "eager",
            StartBound::Device => "device",
            StartBound::KeepsUp => "keeps_up",
        }
    }

    /// Why a batch left by this rule, to follow "the batch left then because".
    pub const fn why(self) -> &'static str {
        match self {
            StartBound::Full => "nothing more could join it",
            StartBound::Frontrun => "one more item would have made it late",
            StartBound::Latest => "that was its last moment to be in time",
            StartBound::Timeout => "its first request had waited for the configured delay",
            StartBound::WakeMargin => "the margin before its last moment began",
            StartBound::Eager => "the policy waits for nothing",
            StartBound::Device => "it waited for nothing but a device",
            StartBound::KeepsUp => "batches of its size keep up with the arrivals",
        }
    }
}

/// The numbers that decided why a batch leaves now.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct DispatchReason {
    /// The last thing that the batch waited for.
    pub bound: StartBound,
    /// When the window opened. The window opened before the start if the batch waited for a device,
    /// or if the last arrival moved the window.
    pub exec: Time,
    /// When the window closes: `d - l(b)`. `Time::MAX` if waiting loses no request.
    pub latest: Time,
    /// `d`, the earliest deadline in the batch, without the reply's delay.
    pub deadline: Time,
    /// Items that stay in the queue.
    pub left: u32,
}

/// The numbers that led to a request's drop.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct DropDetail {
    /// Items of the request.
    pub size: u32,
    /// When the request's batch had to be done, without the reply's delay.
    pub deadline: Time,
    /// The least time that the request needed, alone and on an idle device: `l(size)` and the way
    /// to the device.
    pub needed: Duration,
    /// The batch size that the window drop aimed at; 0 where the policy has no target.
    pub target: u32,
}
