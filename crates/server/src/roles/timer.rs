//! A timer of the node's thread, finer than the runtime's milliseconds: silence of a few of them is what a scheduler is judged by.

use downbeat_core::Time;
use rustix::time::{Itimerspec, TimerfdClockId, TimerfdFlags, TimerfdTimerFlags, Timespec};
use tokio::io::AsyncReadExt;
use tokio::net::unix::pipe::Receiver;

use crate::clock::Clock;

/// A timer that goes off at a time of the server's clock.
pub struct Timer {
    clock: Clock,
    /// A timer is read like a pipe.
    file: Receiver,
    at: Time,
}

impl Timer {
    /// One that never goes off. Within a runtime.
    ///
    /// # Errors
    /// If the operating system has none left.
    pub fn new(clock: Clock) -> std::io::Result<Self> {
        let flags = TimerfdFlags::NONBLOCK | TimerfdFlags::CLOEXEC;
        let file = rustix::time::timerfd_create(TimerfdClockId::Monotonic, flags)?;
        Ok(Timer { clock, file: Receiver::from_file_unchecked(file.into())?, at: Time::MAX })
    }

    /// From now on it goes off at this time, and at no other.
    ///
    /// # Errors
    /// Of the operating system.
    pub fn set(&mut self, at: Time) -> std::io::Result<()> {
        if at == self.at {
            return Ok(());
        }
        let wait = if at == Time::MAX { 0 } else { at.since(self.clock.now()).as_nanos().max(1) };
        let zero = Timespec { tv_sec: 0, tv_nsec: 0 };
        // All zero: never.
        let value = Timespec { tv_sec: (wait / 1_000_000_000) as i64, tv_nsec: (wait % 1_000_000_000) as i64 };
        let setting = Itimerspec { it_interval: zero, it_value: value };
        rustix::time::timerfd_settime(&self.file, TimerfdTimerFlags::empty(), &setting)?;
        self.at = at;
        Ok(())
    }

    /// Waits until it goes off.
    ///
    /// # Errors
    /// Of the operating system.
    pub async fn wait(&mut self) -> std::io::Result<()> {
        // Of 8 bytes: that fewer come than would fit tells the runtime that there are no more, without asking.
        let count = self.file.read(&mut [0; 16]).await?;
        debug_assert_eq!(count, 8, "a timer that has gone off says how often");
        self.at = Time::MAX;
        Ok(())
    }
}
