//! The executor process of a model, as its users see it.

/// A model's executor process. When the process ends, its successor takes its place.
pub trait Executor: Send + Sync {
    /// The process id of the serving process.
    fn pid(&self) -> Option<u32>;

    /// The number of the signal that ended the last process.
    fn signal(&self) -> Option<i32>;

    /// Waits some seconds until an ended process is up again. Returns true if it is. A trial's
    /// process is never started again.
    fn comes_back(&self) -> bool;

    /// The number of restarts.
    fn restarts(&self) -> u64;

    /// The reason why the model does not run just now: its process has ended, and is being started
    /// again. `None`: it runs. Cheap to ask.
    fn down(&self) -> Option<String>;
}

/// Hears whether a model's own code is ready. An error says why the code is not ready.
pub type OnReady = Box<dyn FnOnce(Result<(), String>) + Send>;
