//! How many files the process may have open, of which connections are most.

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

/// Files that are not connections of the frontends: ports, logs, model files, libraries, the
/// metrics port's connections, and clients that are being refused.
const RESERVE: u64 = 40;
/// Files of an event loop with connections: its epoll instance, and the file that wakes it.
const OF_EVENT_LOOP: u64 = 4;
/// Fewest connections, under any limit of files.
const LEAST: u64 = 8;
/// The default limit of connections. A connection takes some 20 KiB while it is used, and less
/// while it is idle.
const MOST: usize = 32_768;

/// Raises the soft limit of open files to the hard one. Returns the new limit; `None`: no limit.
pub fn raise_file_limit() -> Option<u64> {
    let limit = getrlimit(Resource::Nofile);
    if limit.current == limit.maximum {
        return limit.current;
    }
    match setrlimit(Resource::Nofile, Rlimit { current: limit.maximum, maximum: limit.maximum }) {
        Ok(()) => limit.maximum,
        Err(error) => {
            tracing::warn!(%error, "the limit of open files cannot be raised");
            limit.current
        }
    }
}

/// How many connections a process has room for that may have `files` files open, with `event_loops`
/// event loops.
pub fn room_for_connections(files: Option<u64>, event_loops: usize) -> usize {
    let reserve = RESERVE.saturating_add(OF_EVENT_LOOP.saturating_mul(event_loops as u64));
    let room = files.unwrap_or(u64::MAX).saturating_sub(reserve).max(LEAST);
    usize::try_from(room).unwrap_or(usize::MAX)
}

/// How many connections suit such a process.
pub fn default_max_connections(files: Option<u64>, event_loops: usize) -> usize {
    room_for_connections(files, event_loops).min(MOST)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn connections_leave_room_for_other_files() {
        assert_eq!(default_max_connections(Some(64), 0), 24);
        assert_eq!(default_max_connections(Some(64), 2), 16);
        assert_eq!(default_max_connections(Some(10), 2), 8);
        assert_eq!(default_max_connections(Some(1 << 20), 64), 32_768);
        assert_eq!(default_max_connections(None, 2), 32_768);
    }
}
