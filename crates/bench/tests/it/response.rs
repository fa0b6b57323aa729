//! The reader understands an HTTP response alike for all cuts, and refuses garbage.

use downbeat_bench::client::response::{Finished, Invalid, Keep, ResponseReader};
use proptest::prelude::*;

/// Pushes the bytes in parts of `part` bytes.
fn read(bytes: &[u8], part: usize) -> Result<(Option<Finished>, Vec<u8>), Invalid> {
    let mut reader = ResponseReader::new(Keep { good: 1 << 20, bad: 1 << 20 });
    let mut finished = None;
    for chunk in bytes.chunks(part) {
        assert_eq!(finished, None, "ended before its last byte");
        finished = reader.push(chunk)?;
    }
    Ok((finished, reader.body().to_vec()))
}

#[test]
fn bodies_end_where_they_say_at_every_cut() {
    let cases: [(&str, u16, bool, &str); 8] = [
        ("HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhello", 200, true, "hello"),
        ("HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n", 200, true, ""),
        ("HTTP/1.1 503 Busy\r\nConnection: close\r\nContent-Length: 2\r\n\r\nno", 503, false, "no"),
        (
            "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\na;x=y\r\n0123456789\r\n0\r\n\r\n",
            200,
            true,
            "abc0123456789",
        ),
        ("HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n1\r\na\r\n0\r\nTrailer: x\r\n\r\n", 200, true, "a"),
        ("HTTP/1.1 204 No Content\r\n\r\n", 204, true, ""),
        ("HTTP/1.0 200 OK\r\nConnection: keep-alive\r\nContent-Length: 1\r\n\r\nx", 200, true, "x"),
        ("HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 400 Bad\r\nContent-Length: 3\r\n\r\nbad", 400, true, "bad"),
    ];
    for (text, status, reusable, body) in cases {
        for part in 1..=text.len() {
            let (finished, read) = read(text.as_bytes(), part).unwrap_or_else(|e| panic!("{text:?} by {part}: {e:?}"));
            assert_eq!(finished, Some(Finished { status, reusable }), "{text:?} by {part}");
            assert_eq!(read, body.as_bytes());
        }
    }
}

#[test]
fn a_body_without_a_length_ends_with_the_connection() {
    let mut reader = ResponseReader::new(Keep { good: 3, bad: 0 });
    assert_eq!(reader.closed(), None, "before anything came, the end of the connection ends no response");
    assert_eq!(reader.push(b"HTTP/1.1 200 OK\r\n\r\nabcdef"), Ok(None));
    assert_eq!(reader.closed(), Some(Finished { status: 200, reusable: false }));
    assert_eq!(reader.body(), b"abc", "no more than asked for is kept");
}

#[test]
fn what_is_not_a_response_is_refused() {
    for text in [
        "SSH-2.0-OpenSSH_9.6\r\n",
        "\u{16}\u{3}\u{1}",
        "HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhello!",
        "HTTP/1.1 200 OK\r\nContent-Length: x\r\n\r\n",
        "HTTP/1.1 200 OK\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\n",
        "HTTP/1.1 200 OK\r\nContent-Length: 99999999999999999999999\r\n\r\n",
        "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
        "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n1\r\nabc\r\n",
        "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nfffffffffffffffffff\r\n",
    ] {
        assert!(read(text.as_bytes(), text.len()).is_err(), "{text:?}");
    }
}

#[test]
fn endless_heads_and_lines_are_refused() {
    let endless = |head: &str| {
        let mut reader = ResponseReader::new(Keep::MESSAGES);
        let _ = reader.push(head.as_bytes());
        (0..10_000).any(|_| reader.push(&[b'a'; 100]).is_err())
    };
    assert!(endless("HTTP/1.1 200 OK\r\nX: "));
    assert!(endless("HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"));
    let mut reader = ResponseReader::new(Keep::MESSAGES);
    let _ = reader.push(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n");
    assert!((0..10_000).any(|_| reader.push(b"A: b\r\n").is_err()));
}

proptest! {
    #[test]
    fn no_bytes_make_it_panic(bytes in prop::collection::vec(any::<u8>(), 0..300), part in 1_usize..300) {
        let mut all = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n".to_vec();
        for prefix in [0, all.len()] {
            let mut reader = ResponseReader::new(Keep::MESSAGES);
            all.truncate(prefix);
            all.extend_from_slice(&bytes);
            for chunk in all.chunks(part) {
                if reader.push(chunk).is_err() {
                    break;
                }
            }
        }
    }
}
