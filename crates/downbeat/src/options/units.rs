//! Parses and writes numbers with units.

use std::time::Duration;

/// Milliseconds, more than 0.
pub fn positive_millis(text: &str) -> Result<downbeat_core::Duration, String> {
    match text.trim().parse::<f64>() {
        Ok(ms) if ms > 0.0 && ms <= 86_400_000.0 => Ok(downbeat_core::Duration::from_millis_f64(ms)),
        Ok(ms) => Err(format!("{ms} ms: must be more than 0 and at most a day")),
        Err(_) => Err(format!("'{text}' is not a number of milliseconds")),
    }
}

/// Nanoseconds in milliseconds.
pub fn in_millis(ns: u64) -> f64 {
    ns as f64 / 1e6
}

/// The number of threads; 0 stands for one a core.
pub fn threads_of(asked: usize) -> usize {
    if asked == 0 { std::thread::available_parallelism().map_or(1, usize::from) } else { asked }
}

/// A number of threads, in words.
pub fn threads(count: usize) -> String {
    if count == 1 { "1 thread".to_owned() } else { format!("{count} threads") }
}

/// Seconds, 0 included.
pub fn parse_seconds(text: &str) -> Result<downbeat_core::Duration, String> {
    let seconds = text.trim().parse().map_err(|_| format!("'{text}' is not a number of seconds"))?;
    match Duration::try_from_secs_f64(seconds) {
        Ok(span) if seconds <= 86_400.0 => Ok(span.into()),
        _ => Err(format!("{seconds} s: must be between 0 and a day")),
    }
}

/// Bytes: `65536`, `64K`, `64MiB`, `1G`; the units are powers of 1024.
pub fn bytes(text: &str) -> Result<usize, String> {
    bytes_or_zero(text).and_then(|n| if n > 0 { Ok(n) } else { Err(format!("'{}' is out of range", text.trim())) })
}

/// As [`bytes()`], 0 included.
pub fn bytes_or_zero(text: &str) -> Result<usize, String> {
    let text = text.trim();
    let digits = text.len() - text.trim_start_matches(|c: char| c.is_ascii_digit()).len();
    let (number, unit) = text.split_at(digits);
    let shift = match unit.trim().to_ascii_lowercase().as_str() {
        "" | "b" => 0,
        "k" | "kb" | "kib" => 10,
        "m" | "mb" | "mib" => 20,
        "g" | "gb" | "gib" => 30,
        _ => return Err(format!("'{text}' is not a size; write bytes, or a number with K, M or G")),
    };
    let number: usize =
        number.parse().map_err(|_| format!("'{text}' is not a size; write bytes, or a number with K, M or G"))?;
    number.checked_mul(1 << shift).ok_or_else(|| format!("'{text}' is out of range"))
}

/// Batch sizes, ascending. clap takes them as one value.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct BatchSizes(pub Vec<u32>);

/// Batch sizes: `8`, `1..32` (both included), `1,2,4`, and combinations.
pub fn batch_sizes(text: &str) -> Result<BatchSizes, String> {
    const LARGEST: u32 = 4096;
    let number = |text: &str| match text.trim().parse::<u32>() {
        Ok(n @ 1..=LARGEST) => Ok(n),
        _ => Err(format!("'{text}' is not a batch size between 1 and {LARGEST}")),
    };
    let mut sizes = Vec::new();
    for part in text.split(',') {
        match part.split_once("..") {
            Some((first, last)) => {
                let (first, last) = (number(first)?, number(last.trim_start_matches('='))?);
                if first > last {
                    return Err(format!("'{part}' is empty; write the smaller size first"));
                }
                sizes.extend(first..=last);
            }
            None => sizes.push(number(part)?),
        }
    }
    sizes.sort_unstable();
    sizes.dedup();
    Ok(BatchSizes(sizes))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_have_units() {
        assert_eq!(bytes("65536"), Ok(65536));
        assert_eq!(bytes("64K"), Ok(65536));
        assert_eq!(bytes("2 MiB"), Ok(2 << 20));
        for wrong in ["", "K", "-1", "1T", "99999999999999999999", "99999999999G", "0"] {
            assert!(bytes(wrong).is_err(), "{wrong}");
        }
    }

    #[test]
    fn batch_sizes_are_numbers_and_ranges() {
        assert_eq!(batch_sizes("8"), Ok(BatchSizes(vec![8])));
        assert_eq!(batch_sizes("1..4,8, 2"), Ok(BatchSizes(vec![1, 2, 3, 4, 8])));
        for wrong in ["", "0", "4..1", "1..", "x", "1..99999999999", "-1"] {
            assert!(batch_sizes(wrong).is_err(), "{wrong}");
        }
    }

    #[test]
    fn spans_are_bounded() {
        assert!(positive_millis("0.5").is_ok());
        for wrong in ["0", "-1", "nan", "inf", "1e300", "x"] {
            assert!(positive_millis(wrong).is_err(), "{wrong}");
        }
        assert!(parse_seconds("0").is_ok());
        for wrong in ["-1", "nan", "inf", "1e300", "x"] {
            assert!(parse_seconds(wrong).is_err(), "{wrong}");
        }
    }
}
