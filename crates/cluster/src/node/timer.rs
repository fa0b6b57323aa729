//! A timer of the node's thread, finer than the runtime's milliseconds. A few milliseconds of
//! silence decide about a leader.

use downbeat_core::Time;
use downbeat_service::clock::Clock;
use rustix::time::{Itimerspec, TimerfdClockId, TimerfdFlags, TimerfdTimerFlags, Timespec};
use tokio::io::AsyncReadExt;
use tokio::net::unix::pipe::Receiver;

/// A timer that goes off at a time of the server's clock.
pub struct Timer {
    clock: Clock,
    /// The timer's file, which is read like a pipe.
    file: Receiver,
    at: Time,
}

impl Timer {
    /// A timer that never goes off. Call this within a runtime.
    ///
    /// # Errors
    /// If the operating system has no timer left.
    pub fn new(clock: Clock) -> std::io::Result<Self> {
        let flags = TimerfdFlags::NONBLOCK | TimerfdFlags::CLOEXEC;
        let file = rustix::time::timerfd_create(TimerfdClockId::Monotonic, flags)?;
        Ok(Timer { clock, file: Receiver::from_file_unchecked(file.into())?, at: Time::MAX })
    }

    /// Sets the time at which the timer goes off, in place of any earlier setting.
    ///
    /// # Errors
    /// The operating system's error.
    pub fn set(&mut self, at: Time) -> std::io::Result<()> {
        if at == self.at {
            return Ok(());
        }
        let wait = if at == Time::MAX { 0 } else { at.since(self.clock.now()).as_nanos().max(1) };
        let zero = Timespec { tv_sec: 0, tv_nsec: 0 };
        // Zeros mean never.
        let value = Timespec { tv_sec: (wait / 1_000_000_000) as i64, tv_nsec: (wait % 1_000_000_000) as i64 };
        let setting = Itimerspec { it_interval: zero, it_value: value };
        rustix::time::timerfd_settime(&self.file, TimerfdTimerFlags::empty(), &setting)?;
        self.at = at;
        Ok(())
    }

    /// Waits until the timer goes off.
    ///
    /// # Errors
    /// The operating system's error.
    pub async fn wait(&mut self) -> std::io::Result<()> {
        // A timer's file gives 8 bytes. A read shorter than its buffer tells the runtime that no
        // more bytes wait, without another call.
        let count = self.file.read(&mut [0; 16]).await?;
        debug_assert_eq!(count, 8, "a timer that has gone off says how often");
        self.at = Time::MAX;
        Ok(())
    }
}
