//! Reads one HTTP/1.1 response from bytes as they come, without a socket.

use crate::results::outcome::Failed;

/// Most bytes of a status line and headers.
const MOST_HEAD: usize = 64 * 1024;
/// Most header lines.
const MOST_HEADERS: usize = 96;
/// Most bytes of a line between chunks, extensions included, and of all trailers together.
const MOST_CHUNK_LINE: usize = 8 * 1024;

/// The error of bytes that are no HTTP response.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Invalid(pub String);

/// The end of a response.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Finished {
    /// Status code.
    pub status: u16,
    /// Whether the connection can carry another request.
    pub reusable: bool,
}

/// The place of the next byte in the response.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Place {
    Head,
    /// A body of this many more bytes.
    Counted(u64),
    /// The line with a chunk's size.
    ChunkSize,
    /// A chunk of this many more bytes.
    Chunk(u64),
    /// The line end after a chunk.
    ChunkEnd,
    /// Lines after the last chunk, up to an empty one.
    Trailers,
    /// A body that ends with the connection.
    UntilClosed,
}

/// A line with its end, and the bytes after it.
type Line<'a> = (Vec<u8>, &'a [u8]);

/// The bytes after a step, and whether the response ended with the step; `None` if more bytes must
/// come.
type Step<'a> = Option<(&'a [u8], bool)>;

/// The number of body bytes to keep; the rest is counted and discarded.
#[derive(Debug, Clone, Copy)]
pub struct Keep {
    /// Bytes of a 200 answer.
    pub good: usize,
    /// Bytes of any other answer.
    pub bad: usize,
}

impl Keep {
    /// The limits for load: no bytes of a good answer, the message of a bad one.
    pub const MESSAGES: Keep = Keep { good: 0, bad: Failed::MESSAGE_LIMIT };
}

/// The state of reading one response after another.
#[derive(Debug)]
pub struct ResponseReader {
    keep: Keep,
    place: Place,
    /// The part of a head or a line that came without its end.
    partial: Vec<u8>,
    trailer_bytes: usize,
    status: u16,
    reusable: bool,
    body: Vec<u8>,
    begun: bool,
}

impl ResponseReader {
    /// A reader that waits for the first response.
    pub fn new(keep: Keep) -> Self {
        ResponseReader {
            keep,
            place: Place::Head,
            partial: Vec::new(),
            trailer_bytes: 0,
            status: 0,
            reusable: true,
            body: Vec::new(),
            begun: false,
        }
    }

    /// Forgets the last response and waits for the next one.
    pub fn reset(&mut self) {
        self.place = Place::Head;
        self.partial.clear();
        self.trailer_bytes = 0;
        self.status = 0;
        self.reusable = true;
        self.body.clear();
        self.begun = false;
    }

    /// The bytes of the body that were kept.
    pub fn body(&self) -> &[u8] {
        &self.body
    }

    /// Whether any byte of the response has come.
    pub fn has_begun(&self) -> bool {
        self.begun
    }

    /// Takes the next bytes. `Ok(Some)`: the response ended with the last of them. A byte beyond
    /// the end is invalid, because no request is open that it could answer.
    ///
    /// # Errors
    /// [`Invalid`] if the bytes are no HTTP/1.x response. The connection can then not be used any
    /// more.
    pub fn push(&mut self, mut bytes: &[u8]) -> Result<Option<Finished>, Invalid> {
        self.begun |= !bytes.is_empty();
        loop {
            let Some((rest, finished)) = self.step(bytes)? else { return Ok(None) };
            bytes = rest;
            if finished {
                if !bytes.is_empty() {
                    return Err(Invalid("bytes after the end of the response".into()));
                }
                return Ok(Some(Finished { status: self.status, reusable: self.reusable }));
            }
        }
    }

    /// Reads bytes up to the end of the present place. Returns the bytes after it, and whether the
    /// response ends there; `None` if more bytes must come.
    fn step<'a>(&mut self, bytes: &'a [u8]) -> Result<Step<'a>, Invalid> {
        match self.place {
            Place::Head if bytes.is_empty() => Ok(None),
            Place::Head => self.head(bytes),
            Place::Counted(left) => {
                let (now, rest) = split(bytes, left);
                self.keep(now);
                let left = left - now.len() as u64;
                self.place = Place::Counted(left);
                Ok((left == 0).then_some((rest, true)))
            }
            Place::ChunkSize | Place::ChunkEnd | Place::Trailers => {
                let Some((line, rest)) = self.line(bytes)? else { return Ok(None) };
                Ok(Some((rest, self.take_line(&line)?)))
            }
            Place::Chunk(left) => {
                let (now, rest) = split(bytes, left);
                self.keep(now);
                let left = left - now.len() as u64;
                self.place = if left > 0 { Place::Chunk(left) } else { Place::ChunkEnd };
                Ok((left == 0).then_some((rest, false)))
            }
            Place::UntilClosed => {
                self.keep(bytes);
                Ok(None)
            }
        }
    }

    /// Reads a line between chunks. Returns whether the response ends with this line.
    fn take_line(&mut self, line: &[u8]) -> Result<bool, Invalid> {
        match self.place {
            Place::ChunkSize => {
                let size = match httparse::parse_chunk_size(line) {
                    Ok(httparse::Status::Complete((_, size))) => size,
                    _ => return Err(Invalid("a chunk without a valid size".into())),
                };
                self.place = if size == 0 { Place::Trailers } else { Place::Chunk(size) };
                Ok(false)
            }
            Place::ChunkEnd if line != b"\r\n" => Err(Invalid("a chunk longer than its size".into())),
            Place::ChunkEnd => {
                self.place = Place::ChunkSize;
                Ok(false)
            }
            _ => {
                self.trailer_bytes += line.len();
                if self.trailer_bytes > MOST_CHUNK_LINE {
                    return Err(Invalid("trailers too long".into()));
                }
                Ok(line == b"\r\n" || line == b"\n")
            }
        }
    }

    /// The connection ended. Returns `Some` if that is the regular end of this response.
    pub fn closed(&self) -> Option<Finished> {
        (self.place == Place::UntilClosed).then_some(Finished { status: self.status, reusable: false })
    }

    fn keep(&mut self, bytes: &[u8]) {
        let most = if self.status == 200 { self.keep.good } else { self.keep.bad };
        let room = most.saturating_sub(self.body.len()).min(bytes.len());
        if let Some(kept) = bytes.get(..room) {
            self.body.extend_from_slice(kept);
        }
    }

    /// Parses the head. Returns the bytes after the head, and whether the response ends with it;
    /// `None` if more bytes must come.
    fn head<'a>(&mut self, bytes: &'a [u8]) -> Result<Step<'a>, Invalid> {
        if self.partial.is_empty() {
            return match self.parse_head(bytes)? {
                Some((length, finished)) => Ok(Some((bytes.get(length..).unwrap_or_default(), finished))),
                None => {
                    self.partial.extend_from_slice(bytes);
                    self.check_head()
                }
            };
        }
        let before = self.partial.len();
        let mut whole = std::mem::take(&mut self.partial);
        whole.extend_from_slice(bytes);
        match self.parse_head(&whole)? {
            // The earlier part did not end the head, so the head is longer than that part.
            Some((length, finished)) => {
                whole.clear();
                self.partial = whole;
                Ok(Some((bytes.get(length.saturating_sub(before)..).unwrap_or_default(), finished)))
            }
            None => {
                self.partial = whole;
                self.check_head()
            }
        }
    }

    fn check_head<T>(&self) -> Result<Option<T>, Invalid> {
        if self.partial.len() > MOST_HEAD { Err(Invalid("headers too long".into())) } else { Ok(None) }
    }

    /// Returns the head's length, and whether the response ends with the head.
    fn parse_head(&mut self, bytes: &[u8]) -> Result<Option<(usize, bool)>, Invalid> {
        let mut headers = [const { std::mem::MaybeUninit::uninit() }; MOST_HEADERS];
        let mut response = httparse::Response::new(&mut []);
        let parsed =
            httparse::ParserConfig::default().parse_response_with_uninit_headers(&mut response, bytes, &mut headers);
        let length = match parsed {
            Ok(httparse::Status::Complete(length)) => length,
            Ok(httparse::Status::Partial) => return Ok(None),
            Err(e) => return Err(Invalid(format!("not an HTTP response: {e}"))),
        };
        let status = response.code.unwrap_or(0);
        let mut reusable = response.version == Some(1);
        let mut counted = None;
        let mut chunked = false;
        for header in response.headers.iter() {
            let name = header.name;
            if name.eq_ignore_ascii_case("content-length") {
                let length = std::str::from_utf8(header.value).ok().and_then(|v| v.trim().parse::<u64>().ok());
                match (length, counted) {
                    (None, _) => return Err(Invalid("a Content-Length that is not a number".into())),
                    (Some(a), Some(b)) if a != b => return Err(Invalid("two different Content-Lengths".into())),
                    (Some(_), _) => counted = length,
                }
            } else if name.eq_ignore_ascii_case("transfer-encoding") {
                chunked = tokens(header.value).last().is_some_and(|t| t.eq_ignore_ascii_case(b"chunked"));
            } else if name.eq_ignore_ascii_case("connection") {
                for token in tokens(header.value) {
                    if token.eq_ignore_ascii_case(b"close") {
                        reusable = false;
                    } else if token.eq_ignore_ascii_case(b"keep-alive") && response.version == Some(0) {
                        reusable = true;
                    }
                }
            }
        }
        if (100..200).contains(&status) && status != 101 {
            // This is an interim response. The real one follows.
            return Ok(Some((length, false)));
        }
        self.status = status;
        self.reusable = reusable;
        let finished = if status == 204 || status == 304 {
            true
        } else if chunked {
            self.place = Place::ChunkSize;
            false
        } else if let Some(counted) = counted {
            self.place = Place::Counted(counted);
            // The next step finds out whether any bytes are left. An empty body ends there.
            false
        } else {
            self.place = Place::UntilClosed;
            self.reusable = false;
            false
        };
        Ok(Some((length, finished)))
    }

    /// Returns a line with its end, put together from parts, and the bytes after the line. `None`
    /// if more bytes must come.
    fn line<'a>(&mut self, bytes: &'a [u8]) -> Result<Option<Line<'a>>, Invalid> {
        let end = bytes.iter().position(|b| *b == b'\n').map(|i| i + 1);
        let (now, rest) = bytes.split_at(end.unwrap_or(bytes.len()));
        self.partial.extend_from_slice(now);
        if self.partial.len() > MOST_CHUNK_LINE {
            return Err(Invalid("a line between chunks too long".into()));
        }
        Ok(end.map(|_| (std::mem::take(&mut self.partial), rest)))
    }
}

fn split(bytes: &[u8], most: u64) -> (&[u8], &[u8]) {
    bytes.split_at(usize::try_from(most).unwrap_or(usize::MAX).min(bytes.len()))
}

fn tokens(value: &[u8]) -> impl Iterator<Item = &[u8]> {
    value.split(|b| *b == b',').map(|t| t.trim_ascii())
}
