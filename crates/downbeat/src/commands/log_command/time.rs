//! Times of a log, as people write them.

use std::str::FromStr;
use std::time::{Duration as StdDuration, SystemTime, UNIX_EPOCH};

use anyhow::{Context, bail};
use downbeat_core::Time;
use downbeat_sim::why::{LogFolder, Span};

/// A time, such as `5m`, `14:05`, `14:05:03.5` or `2026-11-28T14:05:03Z`. The first is an age: it counts
/// back from the end of the log. The others are UTC.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum LogTime {
    Ago(StdDuration),
    /// Hours, minutes and seconds, as they were written.
    OfDay(String),
    At(SystemTime),
}

impl FromStr for LogTime {
    type Err = String;

    fn from_str(text: &str) -> Result<LogTime, String> {
        if let Some(of_day) = time_of_day(text) {
            return Ok(LogTime::OfDay(of_day));
        }
        if let Ok(at) = humantime::parse_rfc3339_weak(text.trim_end_matches(" UTC")) {
            return Ok(LogTime::At(at));
        }
        humantime::parse_duration(text).map(LogTime::Ago).map_err(|_| {
            format!("'{text}' is no time; give an age such as 5m, a time of day such as 14:05:03, or 2026-11-28T14:05:03Z (UTC)")
        })
    }
}

/// `14:05` or `14:05:03.5` with all its parts, if the text is a time of day.
fn time_of_day(text: &str) -> Option<String> {
    let text = text.strip_suffix('Z').unwrap_or(text);
    let parts: Vec<&str> = text.split(':').collect();
    let digits = |part: &str| part.len() == 2 && part.bytes().all(|byte| byte.is_ascii_digit());
    let seconds = |part: &str| digits(part.split('.').next().unwrap_or(""));
    match parts.as_slice() {
        [hours, minutes] if digits(hours) && digits(minutes) => Some(format!("{text}:00")),
        [hours, minutes, rest] if digits(hours) && digits(minutes) && seconds(rest) => Some(text.to_owned()),
        _ => None,
    }
}

impl LogTime {
    /// The instant of a log with this span.
    ///
    /// # Errors
    /// If the log has no wall clock, or the time is before the log.
    pub fn in_log(&self, folder: &LogFolder, span: Span) -> anyhow::Result<Time> {
        let until = span.until.as_nanos();
        if let LogTime::Ago(age) = self {
            let age = u64::try_from(age.as_nanos()).unwrap_or(u64::MAX);
            return Ok(Time::from_nanos(until.saturating_sub(age)));
        }
        let zero = folder.zero_unix_ns();
        if zero == 0 {
            bail!("the log has no wall clock: give an age such as 5m");
        }
        let at = match self {
            LogTime::At(at) => nanos(*at)?,
            LogTime::OfDay(text) => of_day(text, zero.saturating_add(until))?,
            LogTime::Ago(_) => unreachable!("handled above"),
        };
        Ok(folder.instant(at).unwrap_or(Time::ZERO))
    }
}

/// The last instant before `end` with this time of day, in nanoseconds since the Unix epoch.
fn of_day(text: &str, end: u64) -> anyhow::Result<u64> {
    const DAY: u64 = 86_400_000_000_000;
    let date = humantime::format_rfc3339_seconds(UNIX_EPOCH + StdDuration::from_nanos(end)).to_string();
    let date = date.split('T').next().unwrap_or_default().to_owned();
    let at = humantime::parse_rfc3339_weak(&format!("{date}T{text}Z"));
    let at = nanos(at.with_context(|| format!("'{text}' is no time of day"))?)?;
    Ok(if at > end { at.saturating_sub(DAY) } else { at })
}

fn nanos(at: SystemTime) -> anyhow::Result<u64> {
    let since = at.duration_since(UNIX_EPOCH).context("the time is before 1970")?;
    u64::try_from(since.as_nanos()).context("the time is too far in the future")
}

/// A span of a log for people.
pub fn told(folder: &LogFolder, span: Span) -> String {
    let zero = folder.zero_unix_ns();
    let at = |time: Time| match zero {
        0 => format!("{:.3} s", time.as_nanos() as f64 / 1e9),
        zero => {
            let unix = StdDuration::from_nanos(zero.saturating_add(time.as_nanos()));
            humantime::format_rfc3339_millis(UNIX_EPOCH + unix).to_string()
        }
    };
    format!("from {} to {}", at(span.from), at(span.until))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_are_read_as_people_write_them() {
        let read = |text: &str| text.parse::<LogTime>().unwrap();
        assert_eq!(read("5m"), LogTime::Ago(StdDuration::from_secs(300)));
        assert_eq!(read("14:05"), LogTime::OfDay("14:05:00".to_owned()));
        assert_eq!(read("14:05:03.25Z"), LogTime::OfDay("14:05:03.25".to_owned()));
        assert!(matches!(read("2026-11-28T14:05:03Z"), LogTime::At(_)));
        let error = "yesterday".parse::<LogTime>().unwrap_err();
        assert!(error.starts_with("'yesterday' is no time; give an age such as 5m"), "{error}");
    }

    #[test]
    fn a_time_of_day_is_the_last_one_before_the_end() {
        let end = nanos(humantime::parse_rfc3339("2026-11-28T14:05:00Z").unwrap()).unwrap();
        let at = |text: &str| {
            let unix = UNIX_EPOCH + StdDuration::from_nanos(of_day(text, end).unwrap());
            humantime::format_rfc3339_seconds(unix).to_string()
        };
        assert_eq!(at("14:04:00"), "2026-11-28T14:04:00Z");
        assert_eq!(at("14:06:00"), "2026-11-27T14:06:00Z");
    }
}
