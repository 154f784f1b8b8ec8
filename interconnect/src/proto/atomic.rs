//! Atomic operations on values in registered memory.
//!
//! The target's engine executes them one after the other, and changes each value in one atomic step with respect to all threads
//! of the target. Values are in host byte order, which must be the same on both hosts; no other bytes in registered memory are
//! converted either.

use std::sync::atomic::{AtomicU8, AtomicU16, AtomicU32, AtomicU64, Ordering};

use super::memory::Span;

/// Maximum size in bytes of the values that one operation changes. Together with as many compare operands they fit into the
/// smallest datagram, of 576 bytes.
pub const ATOMIC_BYTES_MAX: usize = 240;

/// Data type of a value. Packets carry these discriminants, which are those of libfabric.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs)]
#[repr(u8)]
pub enum Datatype {
    I8 = 0,
    U8 = 1,
    I16 = 2,
    U16 = 3,
    I32 = 4,
    U32 = 5,
    I64 = 6,
    U64 = 7,
    F32 = 8,
    F64 = 9,
}

impl Datatype {
    /// Returns the data type with this discriminant.
    pub fn from_number(number: u8) -> Option<Self> {
        use Datatype::*;
        [I8, U8, I16, U16, I32, U32, I64, U64, F32, F64].get(usize::from(number)).copied()
    }

    /// Size of a value in bytes.
    pub fn size(self) -> usize {
        use Datatype::*;
        match self {
            I8 | U8 => 1,
            I16 | U16 => 2,
            I32 | U32 | F32 => 4,
            I64 | U64 | F64 => 8,
        }
    }
}

/// The function that an atomic operation applies to a value. The operation carries `operand` and `compare`. Packets carry these
/// discriminants, which are those of libfabric.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Change {
    /// Minimum.
    Min = 0,
    /// Maximum.
    Max = 1,
    /// Sum; integers wrap around.
    Sum = 2,
    /// Product; integers wrap around.
    Product = 3,
    /// Logical or: 1 if either value is not 0, otherwise 0.
    LogicalOr = 4,
    /// Logical and: 1 if both values are not 0, otherwise 0.
    LogicalAnd = 5,
    /// Bitwise or.
    BitOr = 6,
    /// Bitwise and.
    BitAnd = 7,
    /// Logical exclusive or: 1 if exactly one value is not 0, otherwise 0.
    LogicalXor = 8,
    /// Bitwise exclusive or.
    BitXor = 9,
    /// Fetches the value without changing it.
    Read = 10,
    /// Stores the operand.
    Write = 11,
    /// Stores the operand if `compare` equals the value.
    SwapEqual = 12,
    /// Stores the operand if `compare` differs from the value.
    SwapNotEqual = 13,
    /// Stores the operand if `compare` is less than or equal to the value.
    SwapLessEqual = 14,
    /// Stores the operand if `compare` is less than the value.
    SwapLess = 15,
    /// Stores the operand if `compare` is greater than or equal to the value.
    SwapGreaterEqual = 16,
    /// Stores the operand if `compare` is greater than the value.
    SwapGreater = 17,
    /// Replaces the bits that are set in `compare` by those of the operand.
    MaskedSwap = 18,
}

impl Change {
    /// Returns the function with this discriminant.
    pub fn from_number(number: u8) -> Option<Self> {
        use Change::*;
        let all = [
            Min,
            Max,
            Sum,
            Product,
            LogicalOr,
            LogicalAnd,
            BitOr,
            BitAnd,
            LogicalXor,
            BitXor,
            Read,
            Write,
            SwapEqual,
            SwapNotEqual,
            SwapLessEqual,
            SwapLess,
            SwapGreaterEqual,
            SwapGreater,
            MaskedSwap,
        ];
        all.get(usize::from(number)).copied()
    }

    /// Whether the function takes compare operands.
    pub fn compares(self) -> bool {
        self as u8 >= Change::SwapEqual as u8
    }

    /// Whether the function is defined for this data type: bitwise functions are not defined for floating-point values.
    pub fn suits(self, datatype: Datatype) -> bool {
        use Change::*;
        let is_fraction = matches!(datatype, Datatype::F32 | Datatype::F64);
        !(is_fraction && matches!(self, BitOr | BitAnd | BitXor | MaskedSwap))
    }

    /// Payload size in bytes of an operation on `count` values.
    pub fn payload_len(self, datatype: Datatype, count: usize) -> usize {
        let numbers = match self {
            Change::Read => 0,
            _ if self.compares() => 2 * count,
            _ => count,
        };
        numbers * datatype.size()
    }
}

/// Computes the new value, or `None` to leave the old value unchanged.
macro_rules! combine {
    ($change:expr, $old:expr, $operand:expr, $compare:expr, $number:ty, $sum:expr, $product:expr, $bits:expr) => {{
        let (old, operand, compare) = ($old, $operand, $compare);
        let (zero, one) = (0 as $number, 1 as $number);
        let truth = |is: bool| Some(if is { one } else { zero });
        let swap = |is: bool| is.then_some(operand);
        match $change {
            Change::Min => swap(operand < old),
            Change::Max => swap(operand > old),
            Change::Sum => Some($sum(old, operand)),
            Change::Product => Some($product(old, operand)),
            Change::LogicalOr => truth(old != zero || operand != zero),
            Change::LogicalAnd => truth(old != zero && operand != zero),
            Change::LogicalXor => truth((old != zero) != (operand != zero)),
            Change::Read => None,
            Change::Write => Some(operand),
            Change::SwapEqual => swap(compare == old),
            Change::SwapNotEqual => swap(compare != old),
            Change::SwapLessEqual => swap(compare <= old),
            Change::SwapLess => swap(compare < old),
            Change::SwapGreaterEqual => swap(compare >= old),
            Change::SwapGreater => swap(compare > old),
            Change::BitOr | Change::BitAnd | Change::BitXor | Change::MaskedSwap => {
                $bits($change, old, operand, compare)
            }
        }
    }};
}

/// Computes the new bits of the value with the bits `old`, or `None` to leave the value unchanged.
fn new_bits(change: Change, datatype: Datatype, old: u64, operand: u64, compare: u64) -> Option<u64> {
    macro_rules! integer {
        ($number:ty) => {{
            let bits = |change, old: $number, operand: $number, compare: $number| match change {
                Change::BitOr => Some(old | operand),
                Change::BitAnd => Some(old & operand),
                Change::BitXor => Some(old ^ operand),
                _ => Some(operand & compare | old & !compare),
            };
            let (old, operand, compare) = (old as $number, operand as $number, compare as $number);
            let (sum, product) = (<$number>::wrapping_add, <$number>::wrapping_mul);
            combine!(change, old, operand, compare, $number, sum, product, bits).map(|new| new as u64)
        }};
    }
    macro_rules! fraction {
        ($number:ty, $word:ty) => {{
            let value = |bits: u64| <$number>::from_bits(bits as $word);
            let none = |_, _, _, _| None;
            let (sum, product) = (<$number as std::ops::Add>::add, <$number as std::ops::Mul>::mul);
            let new =
                combine!(change, value(old), value(operand), value(compare), $number, sum, product, none);
            new.map(|new| u64::from(new.to_bits()))
        }};
    }
    match datatype {
        Datatype::I8 => integer!(i8),
        Datatype::U8 => integer!(u8),
        Datatype::I16 => integer!(i16),
        Datatype::U16 => integer!(u16),
        Datatype::I32 => integer!(i32),
        Datatype::U32 => integer!(u32),
        Datatype::I64 => integer!(i64),
        Datatype::U64 => integer!(u64),
        Datatype::F32 => fraction!(f32, u32),
        Datatype::F64 => fraction!(f64, u64),
    }
}

/// Decodes a value from bytes, whose number is the size of a data type.
fn bits(bytes: &[u8]) -> u64 {
    match *bytes {
        [a] => a.into(),
        [a, b] => u16::from_ne_bytes([a, b]).into(),
        [a, b, c, d] => u32::from_ne_bytes([a, b, c, d]).into(),
        _ => bytes.try_into().map_or(0, u64::from_ne_bytes),
    }
}

/// Changes the values in `target` and appends their old values to `found`. `payload` holds the operands, followed by the
/// compare operands. Returns false and changes nothing if the target is not aligned for the data type or the lengths do not
/// match.
pub(super) fn apply(
    change: Change,
    datatype: Datatype,
    target: Span,
    payload: &[u8],
    found: &mut Vec<u8>,
) -> bool {
    let size = datatype.size();
    let count = target.len() / size;
    let fits = target.len() == count * size
        && target.start().addr().is_multiple_of(size)
        && payload.len() == change.payload_len(datatype, count);
    if !fits || !change.suits(datatype) {
        return false;
    }
    let (operands, compares) = payload.split_at(payload.len().min(count * size));
    for place in (0..count * size).step_by(size) {
        let at = |bytes: &[u8]| bytes.get(place..place + size).map_or(0, bits);
        let (operand, compare) = (at(operands), at(compares));
        let new = |old: u64| new_bits(change, datatype, old, operand, compare);
        macro_rules! update {
            ($cell:ty, $word:ty) => {{
                // SAFETY: at least `size` bytes of the target follow `place`, which is aligned as the target is. The span's
                // creator guarantees valid memory until the region is deregistered, and holds no reference to it.
                let cell = unsafe { <$cell>::from_ptr(target.start().add(place).cast()) };
                let replace = |old: $word| new(u64::from(old)).map(|new| new as $word);
                let old = cell.fetch_update(Ordering::AcqRel, Ordering::Acquire, replace);
                let (Ok(old) | Err(old)) = old;
                found.extend_from_slice(&old.to_ne_bytes());
            }};
        }
        match size {
            1 => update!(AtomicU8, u8),
            2 => update!(AtomicU16, u16),
            4 => update!(AtomicU32, u32),
            _ => update!(AtomicU64, u64),
        }
    }
    true
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Applies one function to one value, and returns the new and the old value.
    fn change<const N: usize>(
        change: Change,
        datatype: Datatype,
        old: [u8; N],
        operand: [u8; N],
        compare: [u8; N],
    ) -> ([u8; N], [u8; N]) {
        let mut word = [0u64; 1];
        let start = word.as_mut_ptr().cast::<u8>();
        // SAFETY: `word` outlives all uses of the span, and the test accesses it only through the span.
        let target = unsafe { Span::new(start, N) };
        assert!(target.write(0, &old));
        let payload: Vec<u8> = [operand, compare].concat();
        let payload = &payload[..change.payload_len(datatype, 1)];
        let mut found = vec![];
        assert!(apply(change, datatype, target, payload, &mut found));
        let mut new = vec![];
        target.read_to(&mut new);
        (new.try_into().unwrap(), found.try_into().unwrap())
    }

    #[test]
    fn integers_change_by_every_operation() {
        use Change::*;
        let cases: [(Change, i16, i16, i16, i16); 21] = [
            (Min, -5, 3, 0, -5),
            (Max, -5, 3, 0, 3),
            (Sum, i16::MAX, 1, 0, i16::MIN),
            (Product, -5, 3, 0, -15),
            (LogicalOr, 0, 4, 0, 1),
            (LogicalAnd, 2, 0, 0, 0),
            (LogicalXor, 7, 9, 0, 0),
            (BitOr, 5, 3, 0, 7),
            (BitAnd, 5, 3, 0, 1),
            (BitXor, 5, 3, 0, 6),
            (Read, 5, 0, 0, 5),
            (Write, 5, 3, 0, 3),
            (SwapEqual, 5, 3, 5, 3),
            (SwapEqual, 5, 3, 4, 5),
            (SwapNotEqual, 5, 3, 4, 3),
            (SwapLessEqual, 5, 3, 5, 3),
            (SwapLess, 5, 3, 5, 5),
            (SwapGreaterEqual, 5, 3, -6, 5),
            (SwapGreater, -5, 3, 4, 3),
            (MaskedSwap, 0x0f0f, 0x3333, 0x00ff, 0x0f33),
            (MaskedSwap, -1, 0, 0, -1),
        ];
        for (number, (what, old, operand, compare, new)) in cases.into_iter().enumerate() {
            let bytes = [old, operand, compare].map(i16::to_ne_bytes);
            let got = change(what, Datatype::I16, bytes[0], bytes[1], bytes[2]);
            assert_eq!(got, (new.to_ne_bytes(), bytes[0]), "case {number}: {what:?}");
        }
        let got = change(Max, Datatype::U8, [200], [100], [0]);
        assert_eq!(got, ([200], [200]), "without a sign");
    }

    #[test]
    fn fractions_change_but_have_no_bits() {
        let bytes = |value: f64| value.to_ne_bytes();
        let got = change(Change::Sum, Datatype::F64, bytes(1.5), bytes(-0.25), bytes(0.0));
        assert_eq!(got, (bytes(1.25), bytes(1.5)));
        let got = change(
            Change::SwapLess,
            Datatype::F32,
            2.0f32.to_ne_bytes(),
            7.0f32.to_ne_bytes(),
            1.0f32.to_ne_bytes(),
        );
        assert_eq!(got.0, 7.0f32.to_ne_bytes());
        let mut word = [0u64; 1];
        // SAFETY: the memory outlives all uses of the span, and the test accesses it only through the span.
        let target = unsafe { Span::new(word.as_mut_ptr().cast(), 8) };
        assert!(!apply(Change::BitOr, Datatype::F64, target, &[0; 8], &mut vec![]));
    }

    #[test]
    fn memory_that_is_not_aligned_or_too_short_is_refused() {
        let mut words = [0u64; 4];
        // SAFETY: the memory outlives all uses of the span, and the test accesses it only through the span.
        let all = unsafe { Span::new(words.as_mut_ptr().cast(), 32) };
        let mut found = vec![];
        for (offset, len, payload) in [(4, 8, 8), (0, 12, 12), (0, 16, 8), (0, 8, 16)] {
            let target = all.part(offset, len).unwrap();
            assert!(!apply(Change::Sum, Datatype::U64, target, &[1; 16][..payload], &mut found));
        }
        assert!(apply(Change::Sum, Datatype::U64, all.part(8, 16).unwrap(), &[1; 16], &mut found));
        assert_eq!(found, [0; 16]);
        assert_eq!(words, [0, 0x0101_0101_0101_0101, 0x0101_0101_0101_0101, 0]);
    }
}
